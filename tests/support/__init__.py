"""What tests share: models, graphs, cards, pools of ranks and comparisons with the unsharded model."""

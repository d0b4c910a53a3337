"""The planner: which collectives to merge, where each starts and where each is waited for.

``problem`` is what is planned, ``simulate`` what a schedule costs, ``solve`` finds one, ``bound`` says
how good it can be. None of these know of graphs; ``from_graph``, ``wishes`` and ``apply`` do.
"""

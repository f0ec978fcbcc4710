"""Training of the learned policies: hand-offs at random, environments over the compiled simulator, two learners.

Nothing at run time imports this room: what leaves it are weights (`schedule.network`). It needs the extra `train`.
"""

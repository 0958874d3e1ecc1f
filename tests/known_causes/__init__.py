"""The known-cause suite: injections whose truth is known, and what the attribution made of them.

``synthetic`` injects into a discrete-event model of a training job, ``real`` into real training on
this machine; both report :class:`~tests.known_causes.results.Case`. ``make validate`` runs them.
"""

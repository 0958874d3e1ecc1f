"""Causes injected into real two-rank training, each timed by its injector's own clock.

``plan`` is what is injected, ``program`` what a rank runs, ``validation.recordings`` starts them,
``chopper.workloads.link`` joins them by a link that can be shaped.
"""

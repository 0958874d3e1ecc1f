"""Readers of recordings that other profilers wrote: Nsight Systems, rocprofv3, rocprof, rpd.

Each module makes a ``recording.Recording`` of its format; from there on all are alike.
"""

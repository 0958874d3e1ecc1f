"""Readers of recordings that other profilers wrote: Nsight Systems, rocprofv3, rocprof, rpd.

Each module makes a :class:`~chopper.collectors.formats._build.Recording` of its format; from there
on all are alike.
"""

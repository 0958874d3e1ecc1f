"""Recording of a program: windows, steps, phases, and how a recording gets into every rank."""

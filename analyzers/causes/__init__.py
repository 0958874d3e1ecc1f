"""Where each nanosecond goes: the causes of computing, communication and idle time."""

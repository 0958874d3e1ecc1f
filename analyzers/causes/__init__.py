"""Attribution of each nanosecond: the causes of computing, communication and idle time."""

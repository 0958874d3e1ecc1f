"""Jobs: schedules, the dependency model, what-ifs."""

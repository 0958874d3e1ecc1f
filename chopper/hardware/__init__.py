"""Devices: what they could do, what they were measured to do, and the machine they are in."""

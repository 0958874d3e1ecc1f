"""The input of every analysis: events joined to launches, steps, layers and other ranks."""

"""What every analysis reads: events joined to launches, steps, layers and other ranks."""

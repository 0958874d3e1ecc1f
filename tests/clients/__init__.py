"""Training programs of real libraries, recorded, and compared with an independent witness."""

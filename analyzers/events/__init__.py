"""Events of all ranks as arrays: what views, comparison and estimates group by."""

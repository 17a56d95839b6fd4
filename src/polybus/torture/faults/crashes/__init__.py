"""A bus dies, or its disk or clock fails: kills, power cuts, I/O errors, clock jumps."""

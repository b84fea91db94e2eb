"""Inference of one example on a CPU: AGO's networks by lowtide, its two ablations, and what people deploy today."""

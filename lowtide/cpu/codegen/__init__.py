"""Stages as C++: one source for a network, made of the templates in kernels.hpp."""

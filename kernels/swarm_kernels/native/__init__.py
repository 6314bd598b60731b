"""The kernels in C++ for CPUs, compiled on the machine that runs them and called through ctypes."""

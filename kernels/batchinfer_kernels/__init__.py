"""Operations the engine runs; each has a float32 reference in :mod:`batchinfer_kernels.reference`."""

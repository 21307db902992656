"""The engine on several devices: one process a rank, rank 0 schedules and samples."""

"""The pages at ``/``: jobs, workers, schedules and usage, rendered here as plain HTML."""

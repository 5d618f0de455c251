"""The worker: what runs beside the simulators."""

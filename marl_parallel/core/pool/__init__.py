"""The worker pool of one `ParallelEnv`, and its extensions."""

"""Tables of settings (TOML): hyperparameters, rivals, search spaces and schedules."""

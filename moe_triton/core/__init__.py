"""What everything stands on: settings, kernels and plans as data, errors, checks."""

"""Moving artifacts: `push_artifact` to a store, `pull_artifact` from it, `collect_garbage`."""

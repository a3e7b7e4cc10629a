"""From a checkpoint to a server: the plan, the engine's command, the deployment files."""

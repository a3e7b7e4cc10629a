"""From a checkpoint to a server: the plan, the engine's command, the files of a deployment."""

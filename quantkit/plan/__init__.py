"""Every tensor of a checkpoint before a weight is read; shared by all that ask."""

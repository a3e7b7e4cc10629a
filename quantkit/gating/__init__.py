"""From a report and a policy to a verdict that a CI job acts on."""

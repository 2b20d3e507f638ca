"""What the load generators share: prompts, drivers for each protocol, the generator's own lag, figures and tables."""

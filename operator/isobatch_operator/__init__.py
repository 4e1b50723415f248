"""Plans and performs what an InferenceService asks for, on local processes or a cluster."""

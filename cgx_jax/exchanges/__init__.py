"""Ways for payloads to travel: one file each, every one blind to what the bytes mean."""

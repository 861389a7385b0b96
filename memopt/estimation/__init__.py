"""What a script would need of a device, found out on a machine that has none."""

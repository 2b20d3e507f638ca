"""Every contract that crosses a process boundary. Everything may import this package; it imports nothing of ours."""

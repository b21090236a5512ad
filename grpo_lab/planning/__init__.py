"""What a run will be, before it starts: origins of its settings, counts, memory, commands, time."""

"""Where prompts come from: task sets, the builtin chores, and the data cursor."""

"""Keys and values that sequences keep: their memory, their scales, and what they are valid for."""

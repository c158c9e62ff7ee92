"""A shop's customer service: its database and tools, its customers, and the rules that it is judged by."""

"""What runs inside the sandbox, mounted there as a folder of its own: it imports nothing of ropewalk, and little else,
because every program pays for its start."""

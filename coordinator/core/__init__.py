"""The deciding half of the coordinator: methods in, facts out. Clock, disk and wire are left to the runtime."""

"""Translation between messages and data classes, status codes and channel settings; nothing else knows both sides."""

"""Generated messages and services (`make proto`) beside the .proto files that specify them."""

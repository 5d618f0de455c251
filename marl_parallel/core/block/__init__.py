"""The block of transitions: records, columns, arrays, and the compiled code that writes and reads them."""

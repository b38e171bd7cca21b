"""Every message that crosses a process boundary, declared once, and the channels that carry them."""

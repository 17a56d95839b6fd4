"""`polybus torture`: harms a real bus in every way, and checks that it kept its promises."""

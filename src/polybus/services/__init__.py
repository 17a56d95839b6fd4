"""What lives between the bus and the sockets: it may await, owns no socket, knows no edge."""

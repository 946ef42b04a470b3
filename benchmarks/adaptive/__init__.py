"""How tokens travel on slow networks: hosts are network namespaces of one machine, their cables have a rate (`tc
tbf`)."""

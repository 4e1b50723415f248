// Command pause does nothing until told to end: the first process of each pod, and of the node.
// Orphans become its children, so it takes their exit codes.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func reap() {
	for {
		if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 && err != syscall.EINTR {
			return
		}
	}
}

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	reap() // a child may have ended before its signal was asked for
	for got := range signals {
		if got != syscall.SIGCHLD {
			return
		}
		reap()
	}
}

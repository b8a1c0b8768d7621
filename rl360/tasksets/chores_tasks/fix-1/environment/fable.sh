echo valley

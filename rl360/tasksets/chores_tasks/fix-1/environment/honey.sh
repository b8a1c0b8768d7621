echo "valley"

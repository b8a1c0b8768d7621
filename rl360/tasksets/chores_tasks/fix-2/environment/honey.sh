echo "cedar"

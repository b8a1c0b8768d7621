echo brick
